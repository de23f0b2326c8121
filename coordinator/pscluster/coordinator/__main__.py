from pscluster.core.importing import without_collections

with without_collections():
    from pscluster.coordinator.cli.script import main

main()

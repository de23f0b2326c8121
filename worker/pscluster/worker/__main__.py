from pscluster.core.importing import without_collections

with without_collections():
    from pscluster.worker.main import main

main()

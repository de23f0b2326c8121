from pscluster.core.importing import without_collections

with without_collections():
    from pscluster.ps.server.main import main

main()

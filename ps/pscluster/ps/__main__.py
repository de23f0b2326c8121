from pscluster.ps.server.main import main

main()

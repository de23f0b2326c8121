from pscluster.ps.main import main

main()

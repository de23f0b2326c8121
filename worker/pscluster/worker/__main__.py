from pscluster.worker.main import main

main()

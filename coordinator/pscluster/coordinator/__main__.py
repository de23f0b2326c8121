from pscluster.coordinator.cli.script import main

main()

from pscluster.coordinator.script import main

main()

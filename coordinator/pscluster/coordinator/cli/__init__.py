"""The command line. Importing it imports little: containers run `pscluster health` every few seconds."""

"""What a run keeps: the files in its folder, on this machine or at a URL."""

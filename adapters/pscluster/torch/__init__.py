"""PyTorch modules whose parameters are on the parameter servers. PyTorch is imported only once it is used."""

"""Keras 3 models whose weights are on the parameter servers. Keras is imported only once it is used."""

"""JAX pytrees whose arrays are on the parameter servers. JAX is imported only once it is used."""

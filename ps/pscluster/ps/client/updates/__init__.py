"""Updates of the parameter servers, whole and in fewer bytes."""

"""What clients ask of a server: variables created, read and updated, each request checked before it is applied."""

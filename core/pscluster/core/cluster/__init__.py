"""Who is in the cluster: its description, and the resolvers that find it."""

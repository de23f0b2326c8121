"""The cluster's description, and the resolvers that find it."""

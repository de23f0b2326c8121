"""Who may call: the cluster token, which is proved and never sent, on every way there is to a role."""

"""Who may call: TLS, certificates, and the cluster token, which is proved and never sent."""

"""Maps of datasets that run in processes of their own."""

"""cluster.yaml as one typed tree, and how it is read and written."""

"""YAML files with typed keys: values with their lines, and mistakes reported with file, line and key."""

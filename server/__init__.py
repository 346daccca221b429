"""HTTP, command line and logs. Imports from `engine` only what its package exports."""

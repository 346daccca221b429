"""Blocks of the prefix cache on disk: they outlive the process, and all processes of a machine share them."""

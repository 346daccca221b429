"""Puts the parts of an engine together, and says what a start would use."""

"""Which drafts the target accepts, and what it draws in place of the first that it rejects."""

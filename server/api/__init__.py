"""The APIs: what requests may say, and how they are answered."""

"""What clients of llama.cpp's server ask for and no other API has."""

"""Speed and memory of both packages beside their peers; `make bench`."""

"""The gallery: recorded studies, and a page about each with its verdict, sources and limits."""

"""What models write beside the text of an answer: calls of tools, and thinking. One file for each format."""

"""Pages of documents, drawn in processes of their own."""

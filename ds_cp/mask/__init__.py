"""What a query sees: documents and rules, and the schedule of rows and tiles that follows from them."""

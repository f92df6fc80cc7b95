"""Which keys each query sees: documents and rules, and the schedule of rows and tiles that they lead to."""

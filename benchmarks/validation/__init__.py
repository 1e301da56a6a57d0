"""What the projection is held against: every case, how it is predicted, and the table that the package carries."""

"""What the routes of the root Tinker door stand on: whom a body is for, where trainers answer, models being made."""

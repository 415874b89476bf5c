"""What is known of training before anything trains: tables and pure functions. Nothing of the trainers
(`trainmaster.training`) is imported here."""

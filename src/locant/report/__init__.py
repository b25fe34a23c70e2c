"""From tables to pictures and pages. Nothing is computed here."""

"""Run folders, budgets and texts: shared by everything that trains. Imports no other package of locant."""

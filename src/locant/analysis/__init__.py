"""Pure functions from schemes and tensors to tables. Figures are made from the tables in `locant.report`."""

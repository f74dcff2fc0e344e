"""The contest of ASPLOS'25 / EuroSys'25 on intra-operator parallelism: its problems, limits and standings."""

"""What an equation of a jaxpr is, for every analysis: which of them are calls (`calls`), how jaxprs are walked (`walk`)
and evaluated (`interpreter`)."""

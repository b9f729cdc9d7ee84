"""IntraSkill: a policy and a bank of natural-language skills that evolve together on a simulated shop."""

"""Pure summaries: what was observed and planned in, conditions and counts out."""

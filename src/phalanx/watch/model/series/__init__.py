"""Values over time: curves, rates, histograms and the phases of a rank."""

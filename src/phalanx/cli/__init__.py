"""The command line: commands/ has one file per verb, options/ the options of `phalanx run`."""

WHO = "the script's own yaml"

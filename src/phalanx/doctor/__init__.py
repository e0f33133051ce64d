"""What is wrong with a machine, or between machines. Each check reads facts and judges them separately."""

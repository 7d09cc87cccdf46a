"""What runs inside each rank's process: a control thread beside vLLM's own loop, and the code that receives weights there."""

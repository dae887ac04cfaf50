"""my_task: an agent, its reward and its data, trained by seamless_verl."""

"""SGLang 0.5.23's HTTP interface: `/generate`, its answers on OpenAI's routes, control routes and errors."""

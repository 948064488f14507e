"""What pytest loads by itself where offload-core is installed. Light to import."""

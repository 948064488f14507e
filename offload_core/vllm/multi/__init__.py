"""``WeightedMultiConnector``: vLLM's MultiConnector with a choice by matched tokens times weight."""

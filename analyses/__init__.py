"""The studies: functions from models, batches and runs to pandas tables and figures."""

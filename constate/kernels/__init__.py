"""The ops: sequence mixing over plain tensors and spans. No model, module or state record is known here."""

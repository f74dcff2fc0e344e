def initialize(): pass

"""stub"""
class Lock:
    @staticmethod
    def read():
        return Lock()
    def table(self):
        return {}
